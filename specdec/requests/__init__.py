"""Requests from prompt to text: kinds of prompts, sampling and stopping. Independent of rounds and devices."""
