"""Reports: tables, charts and pages made from run directories."""
