"""AUD: what an audit of the rows found."""
