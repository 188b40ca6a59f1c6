"""A trained model as a Hugging Face model directory: which published architecture it is, its names, its files."""
