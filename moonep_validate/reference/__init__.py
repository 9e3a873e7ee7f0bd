"""Our own MoonEP and experts, to the letter of docs/contract.md, for machines without the real ones."""
