"""`python -m bench`, which is what `python -m pyops bench` runs."""

import sys

from bench.harness import main

sys.exit(main())
