"""The paper's tables: published numbers, beside runs that follow its protocol."""
