"""The report: one offline page that explains a run."""
