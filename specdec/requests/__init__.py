"""Requests from prompt to text. What varies: kinds of prompts, sampling and stopping; nothing of rounds or devices."""
