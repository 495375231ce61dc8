"""Other tools' configs, read into SureFit's terms."""
