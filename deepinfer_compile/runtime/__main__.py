"""`python -m deepinfer_compile.runtime` is `deepinfer-engine`."""

import sys

from deepinfer_compile.runtime.cli import main

sys.exit(main())
