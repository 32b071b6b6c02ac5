"""`python -m deepinfer_compile` is `deepinfer-compile`."""

import sys

from deepinfer_compile.cli import main

sys.exit(main())
