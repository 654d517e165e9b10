import sys
from fucina.apps.cli import main
sys.exit(main())
