"""Load and measurement against OpenAI endpoints. Knows no torch, no Kubernetes."""
