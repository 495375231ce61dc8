"""`python -m surefit`."""

from surefit.cli.app import main

main()
