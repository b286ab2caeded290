"""The accuracy of decoding with states in other formats than fp32, on trained models."""
