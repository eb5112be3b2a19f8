import sys

from tests.gpu.table import main

if __name__ == "__main__":
    sys.exit(main())
