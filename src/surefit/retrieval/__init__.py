"""The first stage of a recommender: from a history to candidates."""
