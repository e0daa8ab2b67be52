"""What agent, supervisor and jobs of a host share: messages, facts, reasons, spool."""
