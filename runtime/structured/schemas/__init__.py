"""JSON Schemas (draft 2020-12, a subset), read as languages of JSON texts."""
