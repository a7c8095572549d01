"""What router and worker have in common as HTTP servers: error bodies, bearer tokens, watched Secrets."""
