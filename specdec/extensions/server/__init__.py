"""`specdec serve`: an HTTP server with OpenAI's interface over one model. Extra [serve]; see docs/service.md."""
