"""The router: OpenAI API in front, two legs per request behind. Knows no torch and no kopf."""
