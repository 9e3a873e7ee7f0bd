"""Counting taps in every process of a served engine: was MoonEP really used there?"""
