"""Names of the files in a run's folder."""

from tilenet.parallel.health.rank_times import TIMINGS
from tilenet.parallel.health.trace import TRACE

TABLES = "history.csv", "validation.csv", "confusion.csv"
KEPT_RUN_FILE, FACTS, REPORT = "run.yaml", "run.json", "report.html"
RUN_FILES = (*TABLES, TRACE, KEPT_RUN_FILE, FACTS, TIMINGS, REPORT)
