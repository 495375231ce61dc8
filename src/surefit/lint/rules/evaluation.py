"""EVL: how a model is scored."""
