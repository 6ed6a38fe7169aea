"""The ranks: who this process is among them, how they meet, what they agree on, who has died, what DDP sends."""
