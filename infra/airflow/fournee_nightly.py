"""Fournée every night under Airflow 3: put this file into the folder of the DAGs.

A retry gets the same logical date, and with it the same run folder: it resumes, or finds everything done.
"""

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

RUNS = "s3://your-bucket/answers"
SETTINGS = f"--config-dir my_conf experiment=nightly run_date={{{{ ds }}}} output=bucket output.path={RUNS}/{{{{ ds }}}}"

with DAG(
    dag_id="fournee_nightly",
    schedule="0 1 * * *",
    start_date=datetime(2026, 11, 30, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    default_args={"cwd": "/opt/fournee", "append_env": True, "env": {"RAY_AUTH_MODE": "token"}},
):
    batch = BashOperator(
        task_id="batch",
        bash_command=f".venv/bin/fournee submit address=http://head:8265 -- batch {SETTINGS}",
        retries=3,
        retry_delay=timedelta(minutes=5),
    )
    check = BashOperator(task_id="check", bash_command=f".venv/bin/fournee history check {RUNS}")
    batch >> check
