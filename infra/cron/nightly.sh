#!/bin/bash
# One night on a Ray cluster that is there already, with a look at it in the morning: infra/cron/nightly.sh 2026-11-30
# fournee.crontab calls it. The exit code is the job's own; one that was stopped, or lost its cluster, is submitted again.
set -uo pipefail

run_date=${1:?the day of the run is missing}
runs=s3://your-bucket/answers
export RAY_AUTH_MODE=token                       # the token: ~/.ray/auth_token

for attempt in 1 2 3; do
    fournee submit address=http://head:8265 -- \
        batch --config-dir my_conf experiment=nightly run_date="$run_date" output=bucket output.path="$runs/$run_date"
    code=$?
    case $code in
        1 | 4) sleep $((attempt * 300)) ;;       # resumes; 0, 2 and 3 would come again
        *) break ;;
    esac
done
if [ "$code" -eq 0 ]; then
    fournee history check "$runs"
    code=$?
fi
exit "$code"
