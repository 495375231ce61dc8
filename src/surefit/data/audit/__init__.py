"""What is in a data set: `sample` answers within a check, `whole` looks at every row, `passport` writes it down."""
