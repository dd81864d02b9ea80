"""From run folders to metrics, tables, figures and pages."""
