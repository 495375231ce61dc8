"""CKP: what is saved, and whether it can be resumed."""
