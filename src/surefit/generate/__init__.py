"""Models answering prompts."""
