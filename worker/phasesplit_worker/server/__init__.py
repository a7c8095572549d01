"""The worker's HTTP side: OpenAI API, legs, admin API, metrics, and the composition of its parts."""
