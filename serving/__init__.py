"""Many requests, one model: continuous batching over a paged cache, behind the OpenAI completions API and a page."""
