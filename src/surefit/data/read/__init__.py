"""Bytes to rows: local files, URLs and hub data sets, plain, compressed or columnar."""
