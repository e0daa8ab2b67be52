"""What stands in SGLang's place where there is no GPU to run it."""
