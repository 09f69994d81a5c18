"""The store: `plan` says what a rank keeps, sends and receives, `ownership` who keeps a sample,
`boxes` holds what is kept, and `budget` says how much that may be.
"""
