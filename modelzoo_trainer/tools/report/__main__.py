"""Write a report: python -m modelzoo_trainer.tools.report RUN_DIR."""

import sys

from modelzoo_trainer.tools.report.command import main

if __name__ == "__main__":
    sys.exit(main())
