"""The wrapped model: how it is run on pages, and the tests that it comes out right. What varies: the architecture."""
