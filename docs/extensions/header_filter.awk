# Filter for Doxygen. Marks the comment with which a header begins as the description of the file, and gives a struct of
# C one declaration instead of two of the same name.
/^\/\/\// && !begun { print "/// @file" }
/^(\/\/\/|namespace|struct|enum|typedef|template)/ { begun = 1 }
/^typedef struct [a-z_]+ \{$/ { sub(/^typedef /, ""); name = $2 }
name != "" && $0 == "} " name ";" { $0 = "};"; name = "" }
{ print }
