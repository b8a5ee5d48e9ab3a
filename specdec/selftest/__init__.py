"""What looks at a model once, while it is loaded: that rounds give what the model itself gives."""
