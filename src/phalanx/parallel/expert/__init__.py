"""Mixture-of-experts layers with their experts on different ranks: dispatch, computation, combination, balance."""
