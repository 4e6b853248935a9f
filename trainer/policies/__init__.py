"""Policies that answer: trained here, frozen, or asked as teachers; sampled by torch or vLLM."""
