"""What changes logits before a token is decided: options of requests, processors of users."""
