"""Real NeMo Gym servers: installed in an environment of their own, hosted or attached to, and never imported here."""
