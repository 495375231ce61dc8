"""Audits of a data set: `sample` fits into a check, `whole` reads every row, `passport` writes the result down."""
