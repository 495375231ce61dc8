"""The path from rows to token ids: read (`read`), converted to examples (`rows`), tokenized and batched (`tokens`)."""
