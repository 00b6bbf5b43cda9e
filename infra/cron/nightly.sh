#!/bin/bash
# One night on a Ray cluster that is there already, with a look at it in the morning: infra/cron/nightly.sh 2026-11-30
# fournee.crontab calls it. The exit code is the job's own; one that was stopped, or lost its cluster, is submitted again, and
# one that is alive already is followed.
set -uo pipefail

run_date=${1:?the day of the run is missing}
runs=s3://your-bucket/answers
export RAY_AUTH_MODE=token                       # the token: ~/.ray/auth_token
said=$(mktemp)
trap 'rm -f "$said"' EXIT

night() {
    fournee submit address=http://head:8265 -- \
        batch --config-dir my_conf experiment=nightly run_date="$run_date" output=bucket output.path="$runs/$run_date"
}

for attempt in 0 1 2; do
    sleep $((attempt * 300))                     # a head may be slow to return
    night 2>&1 | tee "$said"
    code=${PIPESTATUS[0]}
    alive=$(sed -nE 's/^fournee: this run (is alive|was submitted) as ([A-Za-z0-9_-]+).*/\2/p' "$said")
    if [ "$code" -eq 1 ] && [ -n "$alive" ]; then
        fournee submit address=http://head:8265 logs "$alive"
        code=$?
    fi
    case $code in
        1 | 4) ;;                                # resumes; 0, 2 and 3 would come again
        *) break ;;
    esac
done
if [ "$code" -eq 0 ]; then
    fournee history check "$runs"
    code=$?
fi
exit "$code"
