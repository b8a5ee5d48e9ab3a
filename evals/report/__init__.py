"""Results for people. What varies: terminal, HTML, pictures, or Spec-Bench's answer files."""
