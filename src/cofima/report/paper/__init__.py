"""The paper's tables: published numbers next to runs that follow its protocol."""
