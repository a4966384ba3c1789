"""π0.5 and π0: vision-language-action policies that sample action chunks by flow matching."""
