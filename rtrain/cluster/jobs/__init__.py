"""Ray jobs: named after runs, submitted, followed, retried."""
