"""Trainings on several devices."""
