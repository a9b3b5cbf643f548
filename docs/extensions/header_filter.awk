# Filter for Doxygen. Marks the comment with which a header begins as the description of the file, keeps the columns of
# indented tables, and gives a struct of C one declaration instead of two of the same name.
/^\/\/\// && !begun { print "/// @file" }
/^(\/\/\/|namespace|struct|enum|typedef|template)/ { begun = 1 }
/^typedef struct [a-z_]+ \{$/ { sub(/^typedef /, ""); name = $2 }
name != "" && $0 == "} " name ";" { $0 = "};"; name = "" }
# Doxygen takes text for verbatim that follows an empty line and is indented by four columns.
{
  is_indented = $0 ~ /^ *\/\/\/   +[^ ]/
  in_table = is_indented && (in_table || (after_empty && $0 !~ /^ *\/\/\/ +-/))
  after_empty = $0 ~ /^ *\/\/\/$/
  if (in_table) sub(/\/\/\//, "///  ")
  print
}
