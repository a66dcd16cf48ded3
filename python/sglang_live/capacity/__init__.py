"""How many callers there may be: found out while serving, because nobody can know it before."""
