"""A model of published sizes whose weights are random, made where they are used."""
